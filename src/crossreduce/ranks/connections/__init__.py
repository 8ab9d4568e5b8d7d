"""Connections between the processes of a job: authenticated messages, the store, the rendezvous."""
