# The image of the service and of workers. For hosts with GPUs: --build-arg EXTRAS=all,torch,cuda,fleet,postgresql
FROM python:3.11-slim

# Inductor compiles C++ while tuning, and Triton what starts its kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The default index has the CUDA build of torch; where another holds the CPU build, name it with --build-arg.
ARG PIP_EXTRA_INDEX_URL=

WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir $(grep -E '^(setuptools|torch)==' constraints.txt) --constraint constraints.txt

COPY pyproject.toml README.md LICENSE ./
COPY search_spaces search_spaces
COPY autotuner autotuner
ARG EXTRAS=all,torch,postgresql
RUN pip install --no-cache-dir --no-build-isolation --constraint constraints.txt ".[${EXTRAS}]"

# By numbers, so that Kubernetes can tell that it is not root.
RUN groupadd --gid 10001 autotuner \
    && useradd --create-home --uid 10001 --gid 10001 autotuner \
    && install --directory --owner autotuner --group autotuner /data /home/autotuner/.cache
USER 10001:10001
WORKDIR /home/autotuner
VOLUME /data

# All addresses of the container: `-p` reaches no other.
ENV AUTOTUNER_HOST=0.0.0.0 \
    AUTOTUNER_DATABASE=/data/autotuner.sqlite
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/livez', timeout=8)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["autotuner"]
CMD ["serve"]
