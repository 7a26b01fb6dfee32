"""A user's own file, path/to/file.py:function: how it is imported, where it runs, and its errors."""

from common.user_code.loading import (
    call_user_code,
    code_file,
    describe,
    find_namesakes,
    in_user_thread,
    load_function,
    own_file,
)

__all__ = [
    "call_user_code",
    "code_file",
    "describe",
    "find_namesakes",
    "in_user_thread",
    "load_function",
    "own_file",
]
