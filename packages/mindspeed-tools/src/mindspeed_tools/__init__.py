"""Command-line tools around training: conversion and its verification."""
