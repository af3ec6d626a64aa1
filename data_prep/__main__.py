"""`python -m data_prep …` is the same as `data-prep …`."""

from data_prep.cli import app

if __name__ == "__main__":
    app(prog_name="data-prep")
