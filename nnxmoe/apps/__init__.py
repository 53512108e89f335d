"""Applications built on the library: command line, server, planner and evaluation. Nothing else imports them."""
