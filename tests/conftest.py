import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test may reach for the hub
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of processes: `benchmarks` is not installed
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is: with more threads, the same run is not the same bit for bit

import pytest
from hypothesis import settings
from swift import keep_imports, read_metadata_once

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


# Each takes half a minute. At the end, one of them would leave all workers but its own with nothing to do
LONGEST = (
    "test_check.py::test_on_a_cpu",
    "test_cost.py::test_bookkeeping",
    "test_device.py",
    "test_failures.py::test_of_several_processes",
    "test_language.py::test_smollm2",
    "test_language.py::test_the_script_for_a_gpu",
    "test_one_file.py::test_it_learns",
    "test_recipes.py::test_smoke_recipe_is_launched",
    "test_resume.py::test_kill_9",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """With no garbage looked for while test files are imported."""
    read_metadata_once()
    gc.disable()
    result = yield
    gc.enable()
    keep_imports()
    return result


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))


def pytest_runtest_logfinish():
    keep_imports()


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """What a test leaves behind, it leaves in a directory of its own."""
    monkeypatch.chdir(tmp_path)


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="How many runs test_resume.py kills at a random moment.")


@pytest.fixture
def num_kills(request):
    return request.config.getoption("--kills")
