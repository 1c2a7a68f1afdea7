"""Sweeps: many runs over a search space, on Ray. The only importer of ray, with nothing imported by importing the package.

schema, load      the sweep config                control       what runs next, what a report is answered, when it is over
space, points     from a space to run configs     ledger, state what is on disk, and what it means
jobs, bayesian    grid, random; Optuna            tuning        Ray Tune's side: searcher, scheduler, mailbox
asha, population  early stopping; PBT             trial, worker a trial under Ray Train; one process of it
resources         whether a trial fits            driver        all of it together
results, plots, live    tables, files, pictures
"""
