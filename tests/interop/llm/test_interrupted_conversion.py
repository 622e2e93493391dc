"""A fresh process: what importing the library loads, and datasets whose conversion is
killed, or done by several processes at once."""

import pathlib
import subprocess
import sys

import pytest

IMPORTS = """
import sys, warnings
import interop
from interop.llm.utils import RolloutFromModel
assert not {"transformers", "datasets", "tokenizers"} & {*sys.modules}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import interop.rlhf.reward
    from interop.rlhf import TensorDictTokenizer
assert DeprecationWarning in [each.category for each in caught if "interop.rlhf" in str(each.message)], caught
assert interop.rlhf.reward is interop.llm.reward and TensorDictTokenizer is interop.TensorDictTokenizer
sys.modules["datasets"] = sys.modules["transformers"] = None
nothing = type("Nothing", (), {"iter": lambda *_, **__: []})()
for call in (lambda: interop.llm.reward.pre_tokenization_hook(nothing), interop.TokenizedDatasetLoader.make_tokenizer):
    try:
        call()
    except ImportError as error:
        assert "pip install 'fbuf[llm]'" in str(error)
    else:
        raise AssertionError
del sys.modules["datasets"], sys.modules["transformers"]
"""

CONVERSIONS = """
import os, pathlib, signal, sys, time
import datasets
from interop import TensorDictTokenizer, TokenizedDatasetLoader
from tests.interop.llm.fakes import WordTokenizer

datasets.disable_progress_bars()
place = pathlib.Path(sys.argv[1])
texts = ["a " * (n % 5) + "bb" for n in range(50)]
datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})}).save_to_disk(place / "data")
expected = TensorDictTokenizer(WordTokenizer(), 6)({"text": texts})

def load(root, hook=None, workers=1):
    return TokenizedDatasetLoader("train", 6, str(place / "data"), TensorDictTokenizer, hook, root, True,
                                  num_workers=workers, tokenizer_class=WordTokenizer).load()

def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child

def killed_at(event, root):
    "Load, and be killed at the n-th thing that is done to files below the root."
    count = 0
    def watch(name, given):
        nonlocal count
        if name.split(".")[0] in ("open", "os", "shutil") and any(str(root) in str(each) for each in given):
            count += 1
            if count > event:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    load(root)

kills, whole = 0, False
while not whole:
    root = place / f"killed-{kills}"
    status = os.waitpid(forked(lambda: killed_at(kills, root)), 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), status
    whole = status == 0
    assert (load(root) == expected).all(), kills
    left = [path.name for path in (root / "data" / "train").iterdir()]
    assert left == ["6"] or sorted(left) == [".6.making", "6"], left
    kills += int(sys.argv[2])

def slow(dataset):
    (place / f"converted-{os.getpid()}").touch()
    time.sleep(0.2)
    return dataset

def check():
    assert (load(place / "both", slow) == expected).all()

for child in [forked(check) for _ in range(3)]:
    assert os.waitpid(child, 0)[1] == 0
assert len([*place.glob("converted-*")]) == 1
assert (load(place / "workers", workers=2) == expected).all()
print("files were touched", kills, "times")
"""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_a_killed_conversion_is_done_again(every: int, tmp_path: pathlib.Path) -> None:
    root = pathlib.Path(__file__).parents[3]
    command = [sys.executable, "-c", IMPORTS + CONVERSIONS, str(tmp_path), str(every)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[-2]) > 20
