# The image: a CUDA base by digest, the environment of requirements.lock, the engine last.
# Usage: make build [FLASH_ATTN=1], or: docker build -t lmms-engine:local .      More: docs/image.md
ARG BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92

# The compilers stay: Triton, torch.compile and deepspeed build kernels while a job runs.
FROM ${BASE_IMAGE} AS system
# Versions of Ubuntu 24.04; the last part is open, since its archive keeps only the newest security fix.
ARG SYSTEM_PACKAGES="ca-certificates g++=4:13.2.0-* git=1:2.43.0-* make=4.3-* python3=3.12.3-* python3-dev=3.12.3-* python3-venv=3.12.3-* tini=0.19.0-*"
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean && apt-get update -q && \
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends ${SYSTEM_PACKAGES}

FROM system AS environment
ENV PATH=/opt/venv/bin:$PATH \
    DS_BUILD_OPS=0 \
    UV_LINK_MODE=copy \
    UV_CACHE_DIR=/var/cache/python/uv \
    PIP_CACHE_DIR=/var/cache/python/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY requirements.lock ./
# uv itself comes at the lock's version and hash, and so does what deepspeed's source is built with. Bytecode is compiled now: the running image is read-only.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/python,sharing=locked \
    python3 -m venv /opt/venv && \
    awk '/^[^ ]/ { inside = /^uv==/ } inside' requirements.lock >/tmp/uv.lock && \
    pip install -q --require-hashes --no-deps -r /tmp/uv.lock && rm /tmp/uv.lock && \
    VIRTUAL_ENV=/opt/venv uv pip install -q --compile-bytecode --build-constraints requirements.lock --require-hashes -r requirements.lock

# /wheels stays empty unless FLASH_ATTN=1, which compiles for an hour on many cores.
FROM environment AS flash-attn
ARG FLASH_ATTN=0
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0"
ARG MAX_JOBS=""
COPY requirements-flash-attn.lock tools/flash_attn.sh /build/
RUN --mount=type=cache,target=/var/cache/python,sharing=locked \
    mkdir /wheels && if [ "${FLASH_ATTN}" = 1 ]; then bash /build/flash_attn.sh wheel /wheels; fi

FROM environment AS runtime
RUN --mount=type=bind,from=flash-attn,source=/wheels,target=/wheels \
    find /wheels -name '*.whl' -exec pip install -q --no-deps --no-index {} +
# LD_LIBRARY_PATH: the base puts its CUDA libraries before those that torch was built with; only the driver's may be.
# HOME, USER: any --user works, also one without a line in /etc/passwd. What is written lies in /tmp and the volumes.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    HOME=/tmp \
    USER=trainer \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TORCH_EXTENSIONS_DIR=/cache/torch_extensions \
    MPLCONFIGDIR=/cache/matplotlib \
    UV_CACHE_DIR=/cache/uv \
    PIP_CACHE_DIR=/cache/pip \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN mkdir -p /app/data /app/runs /cache/huggingface && chmod 1777 /app/data /app/runs /cache /cache/huggingface && \
    sha256sum requirements.lock >/opt/venv/lock.sha256
COPY pyproject.toml README.md LICENSE Makefile ./
COPY tools ./tools
COPY data_prep ./data_prep
COPY lmms_engine ./lmms_engine
COPY recipes ./recipes
# An editable install, so that a checkout mounted over /app is what runs.
RUN VIRTUAL_ENV=/opt/venv uv pip install -q --no-cache --no-deps --no-build-isolation -e .
# Not /app/data and /app/runs: an engine would hide those of a mounted checkout behind volumes that nobody asked for.
VOLUME ["/cache"]
ARG GIT_COMMIT=""
ARG LOCK_SHA256=""
ARG BASE_IMAGE
# The entry point adds the lock's hash, which is in the image whoever built it.
ENV LMMS_IMAGE_COMMIT=${GIT_COMMIT} \
    LMMS_IMAGE_BASE=${BASE_IMAGE}
LABEL org.opencontainers.image.title="lmms-engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${GIT_COMMIT}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      lmms-engine.lock-sha256="${LOCK_SHA256}"
USER 1000:1000
# tini passes SIGTERM on to the launcher, which lets the ranks save; as first process it would not get it.
ENTRYPOINT ["/usr/bin/tini", "--", "/app/tools/entrypoint.sh"]
CMD ["make", "help"]

FROM runtime AS test
COPY . .
CMD ["python", "-m", "pytest", "-n", "2", "--dist", "loadgroup"]

# What is built without --target.
FROM runtime AS image
