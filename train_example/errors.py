"""The one exception for what the user can put right."""


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong and what would be right."""
