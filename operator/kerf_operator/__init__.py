"""The Kerf operator: from a ModelDeployment to a filled compile cache and serving pods.

``observe -> plan -> execute -> status``: see ``docs/operator.md`` for the map.  Importing this
package imports neither kopf nor a Kubernetes client.
"""
