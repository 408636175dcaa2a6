from autoptd.viz.scene import Scene
def model_scene(program, stage=None): return Scene("",(),(),())
