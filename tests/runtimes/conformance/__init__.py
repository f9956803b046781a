"""Whether a runtime keeps its contract: a random walk over everything that an engine may do with one.

`Machine` holds contexts (sequences, snapshots) in blocks and slots that it hands out itself. A step runs prefill
chunks, decode rows and draft rows of some of them in one batch; between steps contexts begin, branch off others, are
exported, imported elsewhere, and end. Memory that nobody owns holds NaN. Each row of logits, and each hidden row, is
compared with that of the same tokens run alone in another instance: bit for bit where the runtime declares batch
invariance.

A walk is a seed and a list of step numbers, and nothing else: a step draws from numbers of its own. So a failing walk
is replayed by its seed, and made short by leaving steps out. That, and a thousand steps a second where the runtime has
them, is why this is no Hypothesis state machine.

    python -m tests.runtimes.conformance --backend numba --family qwen3_5 --steps 50000 --seed 1

walks for long and says how often each thing happened. ``--threads 1 2 3 7`` gives each thread count an instance of its
own, which exchange exported contexts; ``NUMBA_NUM_THREADS`` must allow the highest.
"""
