"""A disaggregated vLLM behind `kvxfer router`, compared with one aggregated server of vLLM."""
