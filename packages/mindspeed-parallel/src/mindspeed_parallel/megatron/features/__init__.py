"""The only place where code of megatron-core, or code that it calls, is patched.

Order of resort: a configuration field, a spec or provider, a subclass, and only then a patch. Each feature says why
nothing before a patch does. ``activate`` switches features on for the code inside and leaves everything as it was.
"""

from .activation import FEATURES, Context, activate, known, resolve

__all__ = ["FEATURES", "Context", "activate", "known", "resolve"]
