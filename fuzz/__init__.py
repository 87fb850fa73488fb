"""Hostile input for everything that reads a file or a message.

    python -m fuzz --inputs 50000           all targets, in workers with a limit of time and memory
    python -m fuzz --targets images wire    some of them
    python -m fuzz --guided                 led by coverage, where atheris is installed (pip install 'fedu2[fuzz]')
    python -m fuzz.replay images FILE       one input again

A target is a module in `fuzz.targets` with `seeds()`, small valid inputs, and `one_input(data)`, which returns or
raises a `FedU2Error`. Any other exception, more than 5 seconds or more than 1 GB for one input is a finding.
"""
