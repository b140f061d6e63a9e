"""The tasks by name. A new one is a file here and a line below."""

from penstock.eval.task import Task
from penstock.eval.tasks.skills import SKILLS

TASKS: dict[str, Task] = {"skills": SKILLS}
