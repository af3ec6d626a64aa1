"""Data preparation: `data-prep <verb>` or `python -m data_prep <verb>`; see `data_prep.cli`."""
