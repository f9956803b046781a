from __future__ import annotations

from tests.server.fuzz import Served, run


def test_whatever_comes_in_what_goes_out_is_valid() -> None:
    served = Served()
    try:
        run(served, 150)
        statistics = served.engine.statistics()
        assert statistics.kv_blocks_free == statistics.kv_blocks_total
    finally:
        served.engine.close()
    assert {200, 400} <= served.statuses.keys()
