"""The terminal: one module a command.

Starting the program imports no array library and no compiler: what a command needs is imported when it runs.
"""
