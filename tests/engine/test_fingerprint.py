"""Equal conditions have equal fingerprints, and each condition of the same-tokens promise changes it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from outrider import LLM
from outrider.model.bundled import bundled_model


def test_each_condition_changes_the_fingerprint(tmp_path: Path) -> None:
    one = LLM(load_format="dummy", speculation="none", max_num_seqs=1).fingerprint
    assert one == LLM(load_format="dummy", speculation="ngram", max_num_seqs=2).fingerprint
    digests = {one.digest} | {
        replace(one, **change).digest
        for change in ({"weights": ""}, {"build": ""}, {"device": ""}, {"dtype": ""}, {"threads": 99})
    }
    assert len(digests) == 6
    assert one.as_dict()["digest"] == one.digest
    copy = tmp_path / "copy"
    shutil.copytree(bundled_model(), copy, ignore=lambda folder, names: [n for n in names if (Path(folder) / n).is_dir()])
    assert LLM(copy, load_format="dummy", speculation="none", max_num_seqs=1).fingerprint == one, "the place does not matter"
    shard = next(copy.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert LLM(copy, load_format="dummy", speculation="none", max_num_seqs=1).fingerprint.weights != one.weights
