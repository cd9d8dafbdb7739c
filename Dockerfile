# syntax=docker/dockerfile:1
# Quire with exactly what pyproject.toml asks for, in the versions of constraints.txt.
#
#   make image                                      # docker build -t localhost/quire:0.1.0 . (or podman, or buildah)
#   docker run --rm -p 8000:8000 localhost/quire:0.1.0 serve --host 0.0.0.0 --insecure      # demo model, CPU
#   docker run --rm --gpus all --shm-size 2g -p 8000:8000 -v quire-models:/cache \
#     localhost/quire:0.1.0 serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key "$KEY"           # NVIDIA GPU
#
# The image runs on both. torch brings CUDA's libraries with it; for a small image without them, point
# --build-arg PIP_EXTRA_INDEX_URL at an index of CPU wheels. Read-only root: mount /tmp and /cache.

# Any Debian with Python and its venv will do.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/quire
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY engine engine
COPY kernels kernels
COPY loadtest loadtest
COPY service service
COPY quire quire
RUN --mount=type=cache,target=/root/.cache/pip /opt/quire/bin/pip install -c constraints.txt .

FROM ${BASE}
# Triton compiles the launchers of its kernels with the system's C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home quire \
    && install -d -o quire -g quire /cache
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOME=/tmp \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
USER 10001:10001
WORKDIR /tmp
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["quire"]
CMD ["serve", "--help"]
