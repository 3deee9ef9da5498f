# syntax=docker/dockerfile:1
# vLLM (CPU build) with kvxfer's connector. It is built in the image of vLLM, so that the engine fits its Python:
#
#   docker build -f deploy/docker/vllm.Dockerfile -t kvxfer-vllm:0.1.0 .
ARG VLLM_IMAGE=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0

FROM ${VLLM_IMAGE} AS build
USER root
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libxxhash-dev libssl-dev libibverbs-dev libfabric-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY engine_native engine_native
COPY kvxfer kvxfer
COPY api api
COPY scheduler scheduler
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
USER root
RUN apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers libfabric1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home kvxfer
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir "$(echo /wheels/kvxfer-*.whl)[otel]"
# Any UID may run it (`docker run --user 1000680000:0`): its home is a folder that all may write to.
ENV HOME=/tmp USER=kvxfer
USER 10001:10001
EXPOSE 8100
ENTRYPOINT []
CMD ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "--help"]
