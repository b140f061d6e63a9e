"""What the source may not say: feature names in the core, and calls that run or unpickle data."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
FILES = sorted(SOURCE.rglob("*.py"))

# What every request passes through. A feature attaches at a seam; these do not know its name.
CORE = ("core/**/*.py", "runtime/model_runner.py", "runtime/input_batch.py", "runtime/graphs.py")
FEATURES = (
    *("grammar", "guided", "schema", "regex", "lora", "adapter", "eagle", "mtp", "medusa"),
    *("speculat", "draft_", "ngram", "moe", "expert", "vision", "image", "audio", "video"),
    *("multimodal", "harmony", "reasoning", "think", "tool", "disagg", "mamba", "quant", "fp8"),
    *("llama", "qwen", "mistral", "deepseek", "gpt"),
)

# Name as written in the source -> the files that may use it.
RESTRICTED: dict[str, tuple[str, ...]] = {
    "eval": (),
    "exec": (),
    "compile": (),
    "__import__": (),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
    "torch.load": (),
    "torch.save": (),
    "os.system": (),
    "yaml.load": (),  # config/load.py has a loader of its own
    "os.getenv": (),
    # The log level, the cache folder, what a child process inherits, where gloo listens, where
    # Triton keeps its binaries, the key that clients show to a server, where a launcher put us.
    "os.environ": (
        "cli/api_key.py",
        "config/launch.py",
        "log.py",
        "hub/folder.py",
        "hub/pull.py",
        "ipc/process.py",
        "kernels/triton_cache.py",
        "parallel/mesh.py",
    ),
    "subprocess": (
        "ipc/process.py",
        "cli/doctor.py",
        "hub/pull.py",
        "kernels/native/compiler.py",
    ),
}


def names(path: Path) -> set[str]:
    """Modules imported, plain names called, and dotted names used."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                found |= {alias.name.partition(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases):
                found |= {module.partition(".")[0], *(f"{module}.{one.name}" for one in aliases)}
            case ast.Call(func=ast.Name(id=name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                found.add(f"{owner}.{attribute}")
    return found


@pytest.mark.parametrize("pattern", CORE)
def test_the_core_names_no_feature(pattern):
    paths = sorted(SOURCE.glob(pattern))
    assert paths
    for path in paths:
        snake_case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.read_text(encoding="utf-8")).lower()
        found = re.findall(rf"(?<![a-z])(?:{'|'.join(FEATURES)})\w*", snake_case)
        assert not found, f"{path} must not know {sorted(set(found))}; attach it at a seam"


def test_restricted_names_are_used_only_where_they_may():
    used = {str(path.relative_to(SOURCE)): names(path) for path in FILES}
    assert len(used) > 100
    for name, allowed in RESTRICTED.items():
        users = {path for path in used if name in used[path]}
        assert users <= set(allowed), f"'{name}' must not be used in {sorted(users - set(allowed))}"
        assert users >= set(allowed), f"'{name}' is no longer used in {set(allowed) - users}"
