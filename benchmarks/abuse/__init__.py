"""One client attacks a server; how soon do /health and another client's request still get their answers?"""
