"""Time to first token of disaggregated vLLM beside an aggregated one (`make bench SUITE=vllm`)."""
