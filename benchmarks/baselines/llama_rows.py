"""Forwards of llama.cpp in a process: `llama_rows.py FILE THREADS CONTEXT`; see benchmarks/formats_llama.py.

A line with a number of rows is answered by the seconds of one forward of as many tokens after the context, with their logits.
The file imports nothing of Outrider.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
import time
from typing import Any


class Forwards:
    """A model after a context."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        import llama_cpp as llama

        self._llama, self._context = llama, context
        llama.llama_backend_init()
        self._log = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._log, ctypes.c_void_p(0))
        of_model = llama.llama_model_default_params()
        of_model.use_mmap = False  # while others run, the system may drop pages of a mapped file
        self._model = llama.llama_model_load_from_file(os.fsencode(path), of_model)
        assert self._model, f"llama.cpp cannot load {path}"
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = context + 64, context, threads, threads
        self._state = llama.llama_init_from_model(self._model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(context, 0, 1)
        self._decode(0, context, False)

    def seconds(self, rows: int) -> float:
        begun = time.perf_counter()
        self._decode(self._context, rows, True)
        taken = time.perf_counter() - begun
        assert self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._state), 0, self._context, -1)
        return taken

    def _decode(self, start: int, rows: int, logits: bool) -> None:
        batch: Any = self._batch
        batch.n_tokens = rows
        for i in range(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = (start + i) * 7919 % self._vocab, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, logits
        status = self._llama.llama_decode(self._state, batch)
        assert status == 0, f"llama_decode: {status}"
        self._llama.llama_synchronize(self._state)


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    forwards = Forwards(path, threads, context)
    print(json.dumps({"version": importlib.metadata.version("llama_cpp_python")}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": forwards.seconds(int(line))}), flush=True)


if __name__ == "__main__":
    main()
