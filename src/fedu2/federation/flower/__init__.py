"""The clients of a federation on other machines, over Flower: `pip install 'fedu2[flower]'`.

    wire.py        what travels: tasks to the sites, replies to the server, and nothing else
    site.py        a client: its own images, its memory, one task at a time; memory.py: on a disk of its own
    backend.py     the server's end of the seam: tasks out, valid replies in
    server.py      a run whose clients are sites; client_app.py and server_app.py are what Flower starts
    init.py        a ready Flower app; keys.py: certificates and node keys
    deployment.py  server and sites on one machine, for trying it out; process.py, guard.py: nothing outlives it

Transport, authentication, encryption and scheduling are Flower's; none of it is written here.
"""
