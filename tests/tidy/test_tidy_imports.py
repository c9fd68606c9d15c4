"""Who may import whom: import-linter's contracts hold here, and each of them breaks when its rule is broken."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, SOURCE_ROOTS, plant

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

CIRCLES = "Modules and packages import each other"
OPERATOR = "The operator needs words alone"

EMPTY_HOUSE = {
    "services/muster/words/__init__.py": "",
    "services/muster/words/names.py": "",
    "services/muster/words/times.py": "import muster.words.text\n",
    "services/muster/recipe/__init__.py": "",
    "services/muster/recipe/document.py": "import pydantic, muster.words.names\n",
    "services/muster/plan/__init__.py": "",
    "services/muster/plan/memory.py": "import muster.recipe.document\n",
    "services/muster/replies/__init__.py": "",
    "services/muster/replies/jobs.py": "import muster.plan.memory\n",
    "services/muster/storage/__init__.py": "",
    "services/muster/storage/store.py": "import muster.plan.memory\n",
    "services/muster/documents/__init__.py": "",
    "services/muster/kube/__init__.py": "",
    "services/muster/kube/client.py": "import muster.recipe.document\n",
    "services/muster/local/__init__.py": "",
    "services/muster/api/__init__.py": "",
    "services/muster/api/app.py": "import muster.api.sweeps\n",
    "services/muster/api/sweeps.py": "import muster.api.data.files\n",
    "services/muster/api/data/__init__.py": "",
    "services/muster/api/data/files.py": "import muster.api.tenants.people\n",
    "services/muster/api/tenants/__init__.py": "",
    "services/muster/api/tenants/people.py": "import muster.api.core.jobs\n",
    "services/muster/api/core/__init__.py": "",
    "services/muster/api/core/jobs.py": "import muster.api.core.events\n",
    "services/muster/api/core/events.py": "",
    "services/muster/agent/__init__.py": "",
    "services/muster/cli/__init__.py": "",
    "services/muster/web/__init__.py": "",
    "services/muster/web/api.py": "import muster.api\n",
    "services/muster/client/__init__.py": "",
    "operator/muster/operator/__init__.py": "",
    "operator/muster/operator/runner.py": "import muster.operator.world\n",
    "operator/muster/operator/world.py": "import muster.operator.core.decide\n",
    "operator/muster/operator/local.py": "import muster.operator.runner\n",
    "operator/muster/operator/replay.py": "import muster.operator.runner\n",
    "operator/muster/operator/core/__init__.py": "",
    "operator/muster/operator/core/decide.py": "import muster.words.names\n",
    "trainer_image/muster/trainer/__init__.py": "",
    "trainer_image/muster/trainer/config.py": "import muster.recipe.document\n",
    "trainer_image/muster/trainer/launch.py": "import muster.trainer.config\n",
    "trainer_image/muster/trainer/models.py": "import torch, muster.trainer.config\n",
    "trainer_image/muster/trainer/data.py": "import muster.trainer.config\n",
    "trainer_image/muster/trainer/convert.py": "import muster.trainer.models\n",
    "trainer_image/muster/trainer/train.py": "import muster.trainer.data\n",
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the source roots of `root`, which come before the installed ones."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(root / source_root) for source_root in SOURCE_ROOTS),
        "COLUMNS": "200",  # or the names of contracts are broken over two lines
    }
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_rules_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.fixture
def house(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return plant(tmp_path, EMPTY_HOUSE)


def test_an_empty_house_keeps_the_rules(house: Path) -> None:
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "code", "broken"),
    [
        ("services/muster/api/app.py", "import muster.operator.core", "The rooms stand on the shared ones"),
        ("services/muster/recipe/document.py", "import muster.trainer.config", "The rooms stand on the shared ones"),
        ("services/muster/kube/client.py", "import muster.api", "The rooms stand on the shared ones"),
        ("services/muster/kube/client.py", "import muster.local", "The rooms stand on the shared ones"),
        ("services/muster/recipe/document.py", "import muster.kube.client", "The rooms stand on the shared ones"),
        ("services/muster/recipe/document.py", "import sqlite3", "Words, recipe, plans and replies do no IO"),
        ("services/muster/documents/reader.py", "import muster.cli.main", "The rooms stand on the shared ones"),
        ("services/muster/storage/store.py", "import muster.kube.client", "The rooms stand on the shared ones"),
        ("services/muster/api/app.py", "import muster.web.api", "The rooms stand on the shared ones"),
        ("services/muster/web/jobs.py", "import muster.api", "Pages reach the API through one module"),
        ("services/muster/api/app.py", "import muster.client", "Only the command line stands on the client"),
        ("services/muster/api/tenants/people.py", "import muster.api.data.files", "The API: the app over"),
        ("services/muster/api/core/jobs.py", "import muster.api.tenants.people", "The API: the app over"),
        ("services/muster/api/webhooks.py", "import muster.api.sweeps", "The API: the app over"),
        ("services/muster/api/jobs.py", "import muster.api.core.jobs", "The API: the app over"),
        ("services/muster/api/core/events.py", "import muster.api.core.jobs", "The API's core"),
        (
            "services/muster/client/jobs.py",
            "import muster.storage",
            "The client stands on words, replies and documents",
        ),
        ("services/muster/cli/main.py", "import torch", "Only the trainer imports torch"),
        ("services/muster/recipe/document.py", "import yaml", "Words, recipe, plans and replies do no IO"),
        ("operator/muster/operator/runner.py", "import muster.operator.local", "The operator: worlds over"),
        ("operator/muster/operator/replay.py", "import muster.operator.local", "The operator: worlds over"),
        ("operator/muster/operator/world.py", "import muster.recipe.document", OPERATOR),
        ("operator/muster/operator/local.py", "import muster.storage.store", OPERATOR),
        ("operator/muster/operator/core/decide.py", "import random", "The operator's core is pure"),
        (
            "operator/muster/operator/core/decide.py",
            "from concurrent.futures import Future",
            "The operator's core is pure",
        ),
        ("trainer_image/muster/trainer/models.py", "import muster.trainer.data", "The trainer: training over"),
        ("trainer_image/muster/trainer/data.py", "import muster.trainer.train", "The trainer: training over"),
        ("trainer_image/muster/trainer/launch.py", "import torch", "The launcher imports no torch"),
        ("services/muster/words/names.py", "import muster.recipe.document", "The rooms stand on the shared ones"),
        ("services/muster/recipe/document.py", "import muster.plan.memory", "The rooms stand on the shared ones"),
        ("services/muster/plan/memory.py", "import muster.replies.jobs", "The rooms stand on the shared ones"),
        ("services/muster/words/text.py", "import muster.words.times", CIRCLES),
    ],
)
def test_a_broken_rule_is_found(house: Path, module: str, code: str, broken: str) -> None:
    plant(house, {module: code + "\n"})
    result = lint_imports(house)
    assert result.returncode == 1, result.stdout + result.stderr
    # A rule with exceptions says after its verdict how many of them it met.
    verdicts = [line for line in result.stdout.splitlines() if line.partition(" (")[0].endswith(" BROKEN")]
    # An import that goes up a layer mostly closes a circle, too, and from words it leads the operator astray.
    expected = {broken} | {rule for rule in (CIRCLES, OPERATOR) if any(line.startswith(rule) for line in verdicts)}
    assert {next(name for name in expected if line.startswith(name)) for line in verdicts} == expected


# Where torch.distributed is used outside of the package that is there for it: before there is a gang.
BEFORE_THE_GANG = {"launch/all_reduce_check.py", "gpus.py"}


def test_only_parallelism_knows_process_groups_and_meshes() -> None:
    """import-linter knows libraries as a whole, and the rule is about a part of torch."""
    trainer = ROOT / "trainer_image/muster/trainer"
    users = {
        path.relative_to(trainer).as_posix()
        for path in trainer.rglob("*.py")
        if any(uses_distributed(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    outside = {user for user in users if not user.startswith("parallel/")}
    assert outside == BEFORE_THE_GANG
    assert "parallel/groups.py" in users


def uses_distributed(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name.startswith("torch.distributed") for name in names)
        case ast.ImportFrom(module=module, names=names):
            part = module or ""
            return part.startswith("torch.distributed") or (
                part == "torch" and any(n.name == "distributed" for n in names)
            )
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            return True
    return False
