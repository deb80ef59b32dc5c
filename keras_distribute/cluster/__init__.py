"""Which processes train together, and how they are started: cluster resolvers, process
start-up, agreement.
"""
