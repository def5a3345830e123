# PyTorch + PyG for Docker, pyxis and enroot. `toolkit build` fills in the arguments; by hand:
#
#   docker build --build-arg VARIANT=cpu --tag registry.example.com/team/pyg:1 .
#
# Both BuildKit and the classic builder of Docker 20.10 take this file: it has no here-documents, no
# `COPY --link`, no `RUN --mount` and no `# syntax=` line (which is fetched from a registry).

# Any image with Python 3.11 or newer that can make a virtual environment. Where it brings torch, as
# NVIDIA's nvcr.io/nvidia/pytorch and nvcr.io/nvidia/pyg do, that torch is used as it is.
ARG BASE=python:3.12-slim-bookworm
# cuda or cpu.
ARG VARIANT=cuda

FROM ${BASE} AS dependencies
ARG VARIANT
# The same as in constraints.txt, where the rest is pinned.
ARG TORCH_VERSION=2.13.0
ARG PYG_VERSION=2.8.1
# An index of torch wheels beside PyPI's, such as https://download.pytorch.org/whl/cu130; auto: PyPI's
# own build for cuda, PyTorch's index for cpu; empty: none.
ARG TORCH_INDEX=auto
# Where wheels of pyg-lib are; empty: go without.
ARG PYG_INDEX=https://data.pyg.org/whl
# pip's own settings, for a mirror. A password in them would stay in the image's history.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
# pip stands apart, so that it is not in the result: in an environment of its own, or the base's.
RUN python3 -m venv --system-site-packages --without-pip /opt/venv \
 && { python3 -m venv /tmp/pip || python3 -m venv --clear --system-site-packages --without-pip /tmp/pip; } \
 && echo /opt/toolkit >"$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/toolkit.pth"
ENV PATH=/opt/venv/bin:$PATH \
    PIP="/tmp/pip/bin/python -m pip --python /opt/venv/bin/python --disable-pip-version-check --retries 2" \
    PIP_NO_CACHE_DIR=1 \
    PIP_ONLY_BINARY=:all:
COPY constraints.txt /tmp/constraints.txt

RUN if python -c "import torch" 2>/dev/null; then \
        echo "The base image's own torch is used, and what it came with stays as it is."; \
        : >/tmp/constraints.txt; \
        python -c "import torch; found = torch.__version__.split('+')[0]; \
assert '$PYTORCH_VERSION' or found == '$TORCH_VERSION', f'the base image has torch {found}: set TORCH_VERSION={found}'"; \
    else \
        case "$TORCH_INDEX:$VARIANT" in \
            auto:cpu) TORCH_INDEX=https://download.pytorch.org/whl/cpu ;; \
            auto:*) TORCH_INDEX= ;; \
        esac; \
        $PIP install --constraint /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$TORCH_VERSION" \
        && python -c "import torch; \
assert bool(torch.version.cuda) == ('$VARIANT' == 'cuda'), f'VARIANT=$VARIANT, but pip found torch {torch.__version__}: set TORCH_INDEX'"; \
    fi

RUN python -c "import torch_geometric" 2>/dev/null \
 || $PIP install --constraint /tmp/constraints.txt "torch-geometric==$PYG_VERSION"

# pyg-lib has compiled sampling kernels, for one version of torch and CUDA each. It is not on PyPI.
RUN wheels=$(python -c "import torch; cuda = torch.version.cuda; \
print('torch-' + torch.__version__.split('+')[0] + '+' + ('cu' + cuda.replace('.', '') if cuda else 'cpu'))") \
 && { test -z "$PYG_INDEX" \
   || python -c "import pyg_lib" 2>/dev/null \
   || $PIP --timeout 15 install --no-deps --no-index --find-links "$PYG_INDEX/$wheels.html" pyg-lib \
   || echo "There is no pyg-lib for $wheels at $PYG_INDEX; PyG works without it, but its NeighborLoader does not."; }

FROM ${BASE} AS runtime-cpu

# enroot gives a container its GPUs only where the image asks for them, and fails to start one that asks
# on a node that has none: so a cpu image must not.
FROM ${BASE} AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${VARIANT}
ARG TORCH_VERSION=2.13.0
COPY --from=dependencies /opt/venv /opt/venv
# enroot starts a login shell, and Debian's /etc/profile sets PATH anew.
RUN mkdir -p /etc/profile.d && echo 'PATH=/opt/venv/bin:$PATH' >/etc/profile.d/venv.sh
# Its presence makes pyxis and enroot's PyTorch hook set the rank variables. A base's own value stays.
ENV PATH=/opt/venv/bin:$PATH \
    PYTORCH_VERSION=${PYTORCH_VERSION:-${TORCH_VERSION}}
LABEL org.opencontainers.image.title="PyTorch + PyG for pyxis and enroot" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.pytorch.version=${PYTORCH_VERSION}
# What changes most comes last: the entrypoint and the workloads, which toolkit.pth puts on the path.
COPY toolkit/__init__.py /opt/toolkit/toolkit/__init__.py
COPY toolkit/entrypoint /opt/toolkit/toolkit/entrypoint
COPY workloads /opt/toolkit/workloads
# Which build this is: `toolkit run` compares it with the one in image.lock, from inside the container.
# The argument has another name, since a variable that the base has would win over one of the same.
ARG IMAGE_BUILD=
ENV TOOLKIT_IMAGE_BUILD=${IMAGE_BUILD}
WORKDIR /workspace
CMD ["python3"]
