"""The key that a client shows to a server: the flag, else the environment's.

A key on the command line is seen by everybody who lists processes; the environment is not.
"""

import os

VARIABLES = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")  # the second is what others' clients read
HELP = f"key the server asks for; default: {' or '.join(VARIABLES)} of the environment"


def api_key_of(given: str | None) -> str | None:
    return given or next(filter(None, map(os.environ.get, VARIABLES)), None)
