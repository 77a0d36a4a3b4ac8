"""The reports of earlier runs: stored after each cell and script, listed, shown, compared and exported.

- `store` is the file with the runs;
- `saving` stores reports in the background, and reads them again;
- `listing` makes the table of runs, and the Parquet files.

`aotlab.report.compare` compares two reports. ``%aotlab runs`` and ``aotlab runs`` are the commands.
"""
