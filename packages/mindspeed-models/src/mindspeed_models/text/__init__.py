"""Text: tokenizers, chat templates, and which tokens are trained."""
