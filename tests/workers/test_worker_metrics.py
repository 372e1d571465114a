"""What a worker's /metrics say of its engine."""

from prometheus_client import generate_latest

from workers.engine.request import EngineInfo, EngineStats
from workers.metrics import WorkerMetrics


class Engine:
    info = EngineInfo(max_model_len=100, slots=4, blocks_total=10, device="none", dtype="none")

    def stats(self) -> EngineStats:
        return EngineStats(
            running=1,
            waiting=2,
            blocks_used=5,
            steps=7,
            prompt_tokens=40,
            generated_tokens=8,
            preemptions=1,
            step_started=0.0,
            step_ms=12.5,
            blocks_cached=3,
            cache_queries=40,
            cache_hits=32,
            blocked=True,
            drafted=9,
            accepted=6,
            late=("a", "b"),
            service={"alice": 30, "_others": 26},
            jain=0.75,
        )


def test_cache_fairness_and_pace_are_shown() -> None:
    metrics = WorkerMetrics("m", "v")
    metrics.watch(Engine())  # type: ignore[arg-type]
    shown = generate_latest(metrics.registry).decode()
    labels = 'model_name="m",version="v"'
    for line in (
        f"vllm:prefix_cache_queries_total{{{labels}}} 40.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 32.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 9.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 6.0",
        f"headrace_kv_blocks_cached{{{labels}}} 3.0",
        f"headrace_step_milliseconds{{{labels}}} 12.5",
        f"headrace_engine_blocked{{{labels}}} 1.0",
        f"headrace_requests_late{{{labels}}} 2.0",
        f"headrace_fairness_jain_index{{{labels}}} 0.75",
        'headrace_tenant_service_total{model_name="m",tenant="alice",version="v"} 30.0',
        'headrace_tenant_service_total{model_name="m",tenant="_others",version="v"} 26.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
    ):
        assert line in shown.splitlines(), shown
