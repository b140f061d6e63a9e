"""Perplexity of a text file: how many tokens the model hesitates between, on average."""

from penstock.eval.published import Continued
from penstock.eval.tasks.files import read_text

PERPLEXITY = Continued(
    file_names=("wikitext-2-raw-test.txt", "wiki.test.raw"), version=1, read=read_text
)
