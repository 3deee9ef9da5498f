"""The bodies of the REST API: pydantic models at the edge, records of `kvxfer` behind it."""
