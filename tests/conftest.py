"""Settings of the whole suite.

With ``ZOO_SHAPES=1`` every annotated shape of the domains is checked at run time. Exporters and
compilers cannot see through those checks, so tests marked ``untyped`` run in a process without
them.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA_IS_PROMISED = os.environ.get("CI") == "true" and "ZOO_DATA" in os.environ

os.environ["HF_HUB_OFFLINE"] = "1"  # oracles must not look for a network
os.environ["ZOO_OFFLINE"] = "1"

if os.environ.get("ZOO_SHAPES") == "1":
    from jaxtyping import install_import_hook

    # An int is a float (PEP 484).
    checker = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    install_import_hook(["vision", "nlp", "rl", "audio"], checker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Heavy proofs may take an hour."""
    for item in items:
        if item.get_closest_marker("prove"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share one cache of their own, and look for weights only where the project does."""
    home = Path(os.environ.get("ZOO_TEST_HOME", tmp_path_factory.getbasetemp() / "zoo-home"))
    monkeypatch.setenv("ZOO_HOME", str(home))
    monkeypatch.delenv("ZOO_WEIGHTS", raising=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """On CI, with the data there, a skipped test is a failed one."""
    outcome = yield
    report = outcome.get_result()
    if DATA_IS_PROMISED and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and CI promises its data"


@pytest.fixture
def fresh_python():
    """Run code in a fresh interpreter that sees the project; gives what it prints."""
    import subprocess

    def run(code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
