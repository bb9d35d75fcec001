"""A fleet: one tuning measures on the GPUs of many hosts at once, through Ray.

An actor per GPU holds the project's `Measurer` and its processes. A tuning hands out batches of calls to the actors,
and alone writes results into the database. Ray is an extra, `autotuner[fleet]`; it is imported when a fleet
is used.

`handout` decides which GPU gets which batch, `roster` which GPUs take part, `reconciling` which jobs run. These know
neither Ray nor a clock.
"""
