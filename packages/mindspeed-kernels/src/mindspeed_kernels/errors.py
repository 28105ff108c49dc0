"""The two kinds of failure that a command line tells apart.

Every package derives its own error type from one of these, so that a command knows the exit code of an error
without knowing the package that raised it.
"""


class UserError(Exception):
    """Something the user can put right: a wrong key, a missing file, a layout that does not fit. Exit code 2.

    The message says where, what, and what would do.
    """


class RunError(Exception):
    """A failure that is not the user's mistake: a dead rank, a full disk, a proof that does not hold. Exit code 1."""
