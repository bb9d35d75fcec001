FROM python:3.11-slim

# Inductor compiles C++ while tuning.
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
RUN pip install --no-cache-dir --no-build-isolation --constraint constraints.txt '.[torch]'

RUN useradd --create-home autotuner
USER autotuner
WORKDIR /home/autotuner
ENTRYPOINT ["autotuner"]
