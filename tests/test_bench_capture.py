"""scripts/bench_capture: its page of made-up figures."""

from tests.script import script


def test_the_page_says_what_reading_takes_beside_dynamo_and_all_sides_beside_the_compiler() -> None:
    bench = script("bench_capture")
    about = {"layers": 80, "date": "2026-11-28", "commit": "abc", "cpu": "a CPU", "torch": "2", "transformers": "5"}
    seconds = {"tuning": 31.0, "dynamo": 14.0, "read": 16.5, "torch.compile": 160.0, "tuned": 120.0}
    found = {side: {"seconds": each, "mib": 1234.0, "regions": 80.0} for side, each in seconds.items()}
    page = bench.page(about, found)
    assert "| tuned | 120.0 | 0.75 | 1,234 |" in page
    assert "takes 2.5 s more" in page
    assert "runs 80 regions tuned" in page
    assert "`scripts/bench_capture --layers 80`" in page
