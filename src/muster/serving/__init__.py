"""``muster.serve``: programs that connect, send observations and get actions."""
