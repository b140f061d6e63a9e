"""The tasks by name. A new one is a file here and a line below."""

from penstock.eval.published import Published
from penstock.eval.task import Task
from penstock.eval.tasks.aime import AIME
from penstock.eval.tasks.gpqa import GPQA
from penstock.eval.tasks.gsm8k import GSM8K
from penstock.eval.tasks.hellaswag import HELLASWAG
from penstock.eval.tasks.mmlu import MMLU
from penstock.eval.tasks.perplexity import PERPLEXITY
from penstock.eval.tasks.skills import SKILLS

TASKS: dict[str, Task | Published] = {
    "skills": SKILLS,
    "gsm8k": GSM8K,
    **AIME,
    "gpqa": GPQA,
    "mmlu": MMLU,
    "hellaswag": HELLASWAG,
    "perplexity": PERPLEXITY,
}
