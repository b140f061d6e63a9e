"""The C functions and their arguments, and the C source that calls them from a list."""

import ctypes

# p pointer (0 is NULL), i int64, f float. All return nothing.
FUNCTIONS = {
    "set_num_threads": "i",
    "set_coarse": "i",
    "packed_linear": "pii pp pi iiii",
    "packed_rows": "pi p pi iiii",
    "rms_norm": "pi pp pp iif",
    "silu_mul": "pi p ii",
    "rope_kv_write": "pipp f ppp ppp iiiiiiii",
    "decode_attention": "pi pp ppp pp iiiiiiiii ff",
    "decode_inputs": "pppp pppp iii",
    "argmax": "pi p ii",
    "run_calls": "pi",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_C_TYPES = {"p": "void *", "i": "int64_t", "f": "float"}
_SETTINGS = ("set_num_threads", "set_coarse")
_RECORDED = [name for name in FUNCTIONS if name not in (*_SETTINGS, "run_calls")]

NUMBERS = {name: number for number, name in enumerate(_RECORDED)}
"""By which a list of calls names a function."""

MAX_ARGUMENTS = max(len(letters.replace(" ", "")) for letters in FUNCTIONS.values())


def declare(loaded: ctypes.CDLL) -> None:
    for name in FUNCTIONS:
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[letter] for letter in arguments(name)]
        function.restype = None


def arguments(name: str) -> str:
    """A letter for each."""
    return FUNCTIONS[name].replace(" ", "")


def calls_source() -> str:
    """`run_calls(calls, count)`: a call is the number of its function, then its arguments."""
    prototypes, cases = [], []
    for name, number in NUMBERS.items():
        letters = arguments(name)
        prototypes.append(f"void {name}({', '.join(_C_TYPES[letter] for letter in letters)});")
        values = ", ".join(f"at[{i}].{letter}" for i, letter in enumerate(letters, 1))
        cases.append(f"      case {number}: {name}({values}); break;")
    return "\n".join(
        [
            "#include <stdint.h>",
            "typedef union { void *p; int64_t i; float f; } Value;",
            *prototypes,
            "void run_calls(const Value *at, int64_t count) {",
            f"  for (; count; count--, at += {1 + MAX_ARGUMENTS})",
            "    switch (at->i) {",
            *cases,
            "    }",
            "}\n",
        ]
    )
