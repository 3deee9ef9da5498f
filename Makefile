# scripts/run has the table of suites. It first installs what a suite needs (scripts/setup), so each works
# in a fresh clone.
TARGETS := help demo test lint docs bench sanitize fuzz model simulate chaos soak attack verify clean
.PHONY: $(TARGETS)

# Variables that are options of a command. They are not for a make that the command starts.
OPTIONS = $(ROUNDS:%=--rounds %) $(SEEDS:%=--seeds %) $(SECONDS:%=--seconds %) $(MINUTES:%=--minutes %) \
  $(RUNS:%=--runs %) $(REVISION:%=--revision %) $(STEP:%=--step %) $(if $(WHOLE),--whole)
unexport SUITE ARGS ROUNDS SEEDS SECONDS MINUTES RUNS REVISION STEP WHOLE
MAKEOVERRIDES =

$(TARGETS):
	@scripts/run $@ '$(SUITE)' $(OPTIONS) $(ARGS)

.DEFAULT:
	@echo "make: there is no target '$@'; make lists the targets and their suites" >&2; false
