"""Random programs as a user would write them, compiled whole and compared with eager and with float64.

python -m tests.random_programs --count 2000 --seed 0 [--jobs 2] [--shrink] [--json FILE]

program.py     a program: its inputs, lines and results, and its text
statements.py, indexing.py, composites.py    the lines that there are
generate.py    draws a program from a seed
rounding.py    eager with other roundings: what a correct result may look like
outcome.py     what a call leaves behind: results, written arguments, gradients
judge.py       compiles a program and says what is wrong
shrink.py      makes a program that fails smaller
workers.py     processes that judge many
"""
