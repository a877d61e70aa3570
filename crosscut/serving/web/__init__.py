"""Everything between the network and a request: connections, permission, routes, waiting for clients, and the page."""
