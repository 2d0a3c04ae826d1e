"""The distribution: what is installed, what it exports, and how torch finds the backend."""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import vitcg_backend

ROOT = pathlib.Path(__file__).parent.parent


def installed():
    """The distribution's metadata; a source tree on PYTHONPATH has none."""
    try:
        return importlib.metadata.distribution("vitcg-backend")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vitcg-backend is not installed here")


def test_every_public_name_exists():
    """`__all__` holds no name that the package lacks."""
    missing = [name for name in vitcg_backend.__all__ if not hasattr(vitcg_backend, name)]
    # A module of that name would take the place of what is public once anything imports it.
    assert not {module.name for module in pkgutil.iter_modules(vitcg_backend.__path__)} & set(vitcg_backend.__all__)
    assert missing == []
    assert len(set(vitcg_backend.__all__)) == len(vitcg_backend.__all__)


def test_version_is_the_one_in_pyproject():
    """The package, its metadata and pyproject.toml agree."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert vitcg_backend.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert installed().version == version


def test_types_are_shipped():
    """`py.typed` lies in the package, so that type checkers read its annotations."""
    assert importlib.resources.files("vitcg_backend").joinpath("py.typed").is_file()


def test_entry_point_is_the_backend():
    """Torch's entry point group holds `vitcg`, and it is the function of backend.py."""
    installed()
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="vitcg")
    assert entry.value == "vitcg_backend.backend:vitcg"
    assert entry.load() is importlib.import_module("vitcg_backend.backend").vitcg


def test_torch_is_the_only_hard_dependency():
    """Everything else is an extra."""
    required = [line for line in installed().requires or () if "extra ==" not in line]
    assert [re.split(r"[^\w-]", line)[0] for line in required] == ["torch"]


def test_torch_finds_the_backend_and_its_import_is_light():
    """In a process of its own: `backend="vitcg"` is found by its name, without an import of ours, and that import brings in
    neither transformers nor triton nor Inductor, but for what torch's own registry does.
    """
    program = (
        "import torch, sys; print('vitcg' in torch.compiler.list_backends(), 'vitcg_backend' in sys.modules); "
        "before = set(sys.modules); import vitcg_backend; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & {'transformers', 'triton'}), "
        "'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    found, light = done.stdout.splitlines()
    assert light == "[] False"
    installed()  # the entry point is the installation's: a source tree on PYTHONPATH has none
    assert found == "True False"


def test_readme_results_come_from_results_files():
    """The tables in the README are what `benchmarks/readme_table.py` makes of the files that they name."""
    readme = (ROOT / "README.md").read_text()
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, made in (("results", module.tables), ("streams", module.streams)):
        text = re.search(rf"<!-- {name}:begin.*?-->\n(.*?)\n<!-- {name}:end -->", readme, re.DOTALL)[1]
        files = [ROOT / "benchmarks" / "results" / file for file in re.findall(r"from `(\S+\.jsonl)`", text)]
        assert files
        assert made(files) == text
