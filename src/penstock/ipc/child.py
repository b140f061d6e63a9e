"""`python -m penstock.ipc.child MODULE`: as `python -m MODULE`, without a search for garbage while
it is imported. Python would look again and again at all that is there already, which is a third of
the time that importing torch takes. `read_task` ends it."""

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
