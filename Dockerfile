# Two images from one file.
#
#   operator   kopf and the Kubernetes client; no torch
#   runtime    torch and a C++ compiler: compiles models (the compile Job) and serves them
#
# Layers, from what changes least to what changes most: base, compiler, locked dependencies, our
# sources.  The dependencies of the runtime are gigabytes and change with requirements/runtime.lock;
# a change of our code replaces only the last layer, about a megabyte.
#
# Any Debian-based image with Python 3.11 or newer and its venv module serves as base: a machine
# without a registry builds its own (python -m hack.images).

ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/kerf/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
# A user with a name: torch asks for one when it chooses its cache folder.
RUN groupadd --gid 65532 kerf \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kerf \
 && python3 -m venv /opt/kerf

# Our own package, installed below /install as it will lie below /: one layer of about a megabyte.
FROM base AS sources
COPY requirements/build.lock /src/requirements/build.lock
RUN pip install --require-hashes -r /src/requirements/build.lock
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
COPY runtime /src/runtime
RUN pip install --no-deps --no-build-isolation --no-compile --root /install /src \
 && python3 -m compileall -q -s /install --invalidation-mode unchecked-hash /install

FROM base AS operator-dependencies
COPY requirements/operator.lock /opt/kerf/operator.lock
RUN pip install --require-hashes --no-deps -r /opt/kerf/operator.lock

FROM operator-dependencies AS operator
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kerf-operator" \
      org.opencontainers.image.description="Kubernetes operator for compiled-model deployments" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV HOME=/tmp TMPDIR=/tmp
WORKDIR /tmp
ENTRYPOINT ["kerf-operator"]
COPY --from=sources /install /
USER 65532:65532

# Inductor compiles C++ against Python's headers, also when no GPU is involved.
FROM base AS compiler
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
 && missing="$(command -v g++ >/dev/null || echo g++) $([ -e "$headers" ] || echo python3-dev)" \
 && if [ "$missing" != " " ]; then \
      apt-get update && apt-get install -y --no-install-recommends $missing \
      && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin; \
    fi

FROM compiler AS runtime-dependencies
COPY requirements/runtime.lock /opt/kerf/runtime.lock
RUN pip install --require-hashes --no-deps -r /opt/kerf/runtime.lock

FROM runtime-dependencies AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kerf-runtime" \
      org.opencontainers.image.description="Compiles models and serves them" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# The root file system is read-only in a pod: everything that is written goes below /tmp, /dev/shm
# or a mounted volume, and every library's cache is told so by name.
ENV HOME=/tmp \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=/tmp/.cache \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    HF_HOME=/tmp/huggingface \
    HF_HUB_OFFLINE=1
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["kerf"]
COPY --from=sources /install /
USER 65532:65532
