"""Plans for several hosts: every share crosses the network once to each host, and a list scheduler orders transfers."""
