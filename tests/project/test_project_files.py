"""The files around the code: versions, workflows, and lists of files agree with each other and with the code."""

import re
import tomllib

import pytest
from paths import LINUX_ONLY, ROOT

import crossreduce

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_files_agree_with_the_package():
    """The citation and the conda recipe have the package's version. The recipe requires what the package and its extra
    "cli" require, except scikit-learn. .pre-commit-config.yaml has the ruff of the extra "dev"."""
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    assert re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M) == [crossreduce.__version__]
    assert re.findall(r'^  version: "(\S+)"$', recipe, re.M) == [crossreduce.__version__]
    run, extras = recipe.partition("  run:\n")[2].partition("\n\n")[0], PROJECT["project"]["optional-dependencies"]
    found = {line.split("- ")[1].replace(" >=", ">=").replace("_", "-") for line in run.splitlines() if "- " in line}
    extra = [each for each in extras["cli"] if "scikit" not in each]
    assert found == {"python", *PROJECT["project"]["dependencies"], *extra}
    (pinned,) = [each for each in extras["dev"] if each.startswith("ruff==")]
    assert f"rev: v{pinned.removeprefix('ruff==')}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_workflows_test_every_supported_version_of_python():
    """The tests run with every version of Python for which wheels are built. The first is the oldest supported one."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    built = re.findall(r"cp3(\d+t?)-", PROJECT["tool"]["cibuildwheel"]["build"])
    assert {f"3.{minor}" for minor in built} <= set(re.findall(r'3\.\d+t?(?=["\]\s,])', text))
    assert PROJECT["project"]["requires-python"] == f">=3.{built[0]}"
    stated = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert stated == [minor for minor in built if minor.isdigit()]


def test_wheels_with_kernels_require_them():
    """Every environment in which cibuildwheel builds sets CROSSREDUCE_REQUIRE_KERNELS."""
    settings = PROJECT["tool"]["cibuildwheel"]
    parts = (settings, *(part for part in settings.values() if isinstance(part, dict)))
    found = [part["environment"]["CROSSREDUCE_REQUIRE_KERNELS"] for part in parts if "environment" in part]
    assert found == ["1", "1"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_few_rights(path):
    """A workflow may only read the repository, has a time limit for each job, and uses no secret.

    Only the job that publishes may request a token of OpenID Connect.
    """
    text = path.read_text()
    assert "\npermissions:\n  contents: read\n\n" in text
    jobs = re.split(r"\n  (?=[\w-]+:\n    name:)", text.partition("\njobs:")[2])[1:]
    assert len(jobs) == text.count("runs-on:") >= 3
    assert all("\n    timeout-minutes: " in job for job in jobs)
    assert [job.split(":")[0] for job in jobs if "permissions:" in job] == ["publish"] * (path.stem != "tests")
    assert not re.search(r"secrets\.|password", text)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_listed_files_exist():
    """Each file that MANIFEST.in, conftest.py, scripts/test_wheel or CONTRIBUTING.md lists exists."""
    manifest = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    named = [name for command, *names in manifest if command in ("graft", "include") for name in names]
    named += [f"tests/{name}" for name in LINUX_ONLY]
    lists = re.findall(r"names\+?=\((.*?)\)", (ROOT / "scripts" / "test_wheel").read_text())
    assert len(lists) == 3
    tests = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    named += [str(tests[f"test_{name}.py"]) for names in lists for name in names.split()]
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    named += [name for name in re.findall(r"`([\w./-]+)`", guide) if name.startswith(("scripts/", "tests/", "docs/"))]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(set(named)) > 40


def files_of_others(folder):
    """Return the names of files that state a copyright, or that have the long lines of minified code."""
    code = re.compile(rb"copyright|@license|[^\n]{2000}", re.IGNORECASE)
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".bin", ".pyc", ".so")]
    return {path.name for path in files if ".egg-info" not in str(path) and code.search(path.read_bytes())}


def test_the_notice_names_the_files_of_other_projects():
    """NOTICE names each file of another project in the package, and each such file has the text of its license.

    Such a file is minified or states a copyright, so the test finds one that is added without a line in NOTICE.
    """
    notice = (ROOT / "NOTICE").read_text()
    assert PROJECT["project"]["license-files"] == ["LICENSE", "NOTICE"]  # so every distribution has them
    found = files_of_others(ROOT / "src")
    assert [name for name in ("kernels.bin", "topology/data", *sorted(found)) if name not in notice] == []
    licenses = {path.name.partition(".")[0] for path in (ROOT / "src").rglob("*.LICENSE")}
    assert {name.partition(".")[0] for name in found} == licenses != set()
