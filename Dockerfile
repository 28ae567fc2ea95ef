# Outrider in a container:  docker build --target cpu -t outrider:cpu .   (or --target cuda)
# Where docker is absent, `make dockerfile-steps` runs these steps in order in a folder of their own.
ARG PYTHON=3.12

# --- the wheel, with the native core for all instruction sets
FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# --- a server on CPUs: no compiler, no root
FROM python:${PYTHON}-slim-bookworm AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /wheels/constraints.txt
RUN pip install --no-cache-dir -c /wheels/constraints.txt --index-url ${TORCH_INDEX} torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /wheels/constraints.txt "outrider[serve] @ file://$(ls /wheels/outrider-*.whl)" && rm -r /wheels
RUN useradd --uid 10001 --create-home outrider && install -d -o outrider /cache
USER outrider
ENV OUTRIDER_HOST=0.0.0.0 OUTRIDER_PORT=8000 OUTRIDER_CACHE=/cache/outrider HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=15s --timeout=5s CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"OUTRIDER_PORT\"]}/health')"]
ENTRYPOINT ["outrider"]
CMD ["serve"]

# --- a server on an NVIDIA GPU: torch brings the CUDA libraries, and Triton needs a C compiler when it starts
FROM python:${PYTHON}-slim-bookworm AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /wheels/constraints.txt
RUN pip install --no-cache-dir -c /wheels/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /wheels/constraints.txt "outrider[serve] @ file://$(ls /wheels/outrider-*.whl)" && rm -r /wheels
RUN useradd --uid 10001 --create-home outrider && install -d -o outrider /cache
USER outrider
ENV OUTRIDER_HOST=0.0.0.0 OUTRIDER_PORT=8000 OUTRIDER_DEVICE=cuda OUTRIDER_CACHE=/cache/outrider HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=15s --timeout=5s CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"OUTRIDER_PORT\"]}/health')"]
ENTRYPOINT ["outrider"]
CMD ["serve"]
